from openai import OpenAI
client = OpenAI()

client.models.list()
