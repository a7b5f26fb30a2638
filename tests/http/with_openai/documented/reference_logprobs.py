from openai import OpenAI
client = OpenAI()

completion = client.chat.completions.create(
  model="VAR_chat_model_id",
  messages=[
    {"role": "user", "content": "Hello!"}
  ],
  logprobs=True,
  top_logprobs=2
)

print(completion.choices[0].message)
print(completion.choices[0].logprobs)
