from openai import OpenAI
client = OpenAI()

client.models.retrieve("VAR_chat_model_id")
